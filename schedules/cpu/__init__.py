"""Default schedules for LLVM targets, one operator family a file."""
