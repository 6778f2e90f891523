"""Tests of the recipes and of the commands that run them."""
