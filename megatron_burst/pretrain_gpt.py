"""The name of `megatron_burst.pretrain` when it trained GPT models alone; the same command."""

from megatron_burst.pretrain import main

if __name__ == "__main__":
    main()
