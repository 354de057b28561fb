"""Reads and writes the file formats in which other projects store FP8, MX and LoRA weights and their scales."""

from typing import Literal, get_args

FileFormat = Literal["compressed-tensors", "fp8", "modelopt"]
"""The formats of FP8 checkpoints that fp8serve writes; docs/formats.md lists the programs that read them."""
FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)
