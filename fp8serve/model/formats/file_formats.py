"""The formats of FP8 weights that are written; docs/formats.md says which programs read which."""

from typing import Literal, get_args

FileFormat = Literal["compressed-tensors", "fp8", "modelopt"]
FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)
