"""TVM's runtime, as a process that runs artifacts uses it: without the compiler, and the threads it computes with."""
