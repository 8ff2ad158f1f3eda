"""Tests of the environment layer."""
