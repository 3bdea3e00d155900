"""Folders and files that a command writes: a bundle takes the place of another only when it is complete. No PyTorch is
needed here."""

from .exchange import whole_folder
from .files import describe_files, write_manifest
from .folder import check_output, check_space, replaced_folder

__all__ = [
    "check_output",
    "check_space",
    "describe_files",
    "replaced_folder",
    "whole_folder",
    "write_manifest",
]
