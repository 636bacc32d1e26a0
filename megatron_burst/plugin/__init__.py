"""What attaches the library to Megatron-Core; nothing else in the package imports Megatron."""
