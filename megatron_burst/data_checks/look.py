"""All that --burst-check-files asks for: before training, and attached to Megatron."""

import argparse

from megatron_burst.data_checks import complete_checkpoints, data_indices
from megatron_burst.data_checks.data_files import check_data_files


def look_at_files(args: argparse.Namespace) -> None:
    """Look at the files that parsed arguments name, now and wherever Megatron reads or saves.

    Raises:
        ValueError: files are missing or damaged, or --save would mix two trainings.
    """
    check_data_files(args)
    data_indices.attach()
    complete_checkpoints.attach(args)
