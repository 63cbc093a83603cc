"""What code generation needs from outside TVM: CUDA's compiler, its libraries, the C compiler that links."""
