"""Default schedules for CUDA targets."""
