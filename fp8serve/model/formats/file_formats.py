"""How a directory may spell its FP8 weights; docs/formats.md says who reads which."""

from typing import Literal, get_args

FileFormat = Literal["compressed-tensors", "fp8", "modelopt"]
FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)
