"""What attaches the library to Megatron-Core; nothing before it imports Megatron."""
