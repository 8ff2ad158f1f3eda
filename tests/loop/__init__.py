"""Tests of the loop layer."""
