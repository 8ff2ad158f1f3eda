"""Tests of the process layer."""
