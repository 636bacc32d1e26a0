"""Trains, and fails where a row moves between ranks inside the model; run by tests."""

from typing import NoReturn

from megatron_burst import pretrain_gpt


def main() -> None:
    from megatron_burst.plugin.hooks import row_exchange

    def carry(*_: object) -> NoReturn:
        raise AssertionError("rows move inside the model")

    row_exchange.carry = carry
    pretrain_gpt.main()
