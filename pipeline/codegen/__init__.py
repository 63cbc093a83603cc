"""Tools of code generation outside of TVM: CUDA's compiler, its libraries, the C compiler that links."""
