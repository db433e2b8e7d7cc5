"""The fabric of GPUs: NVSHMEM symmetric memory, compiled kernels that store to mapped peers."""
