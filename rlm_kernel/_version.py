"""The one place where the version is written: the package and the build both read it from here."""

__version__ = "0.1.0"
