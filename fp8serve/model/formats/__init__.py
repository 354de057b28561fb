"""How projects store FP8 and other small numbers in their files, and the conversion to our conventions."""

from typing import Literal, get_args

FileFormat = Literal["compressed-tensors", "fp8", "modelopt"]
"""The formats of FP8 weights that are written; docs/formats.md says which programs read which."""
FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)
