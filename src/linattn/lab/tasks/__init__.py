"""Data sets: loaders for files in common formats, and data that comes with dependencies."""

from linattn.lab.tasks.images import ImageData, ImageFolders, ImageSplit
from linattn.lab.tasks.load import load_images

__all__ = ["ImageData", "ImageFolders", "ImageSplit", "load_images"]
