"""What the machine must provide is asked for when the algorithm is constructed, with the remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil

import pytest
import torch

from composer_ds.engine import check_environment
from composer_ds.errors import EnvironmentProblem


def test_this_machine_has_it_all():
    check_environment()


def test_no_deepspeed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(EnvironmentProblem, match="pip install 'deepspeed"):
        check_environment()


def test_an_old_deepspeed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, 'version', lambda name: '0.19.7')
    with pytest.raises(EnvironmentProblem, match=r"0\.19\.7 trains wrongly.*pip install 'deepspeed>=0\.19\.8"):
        check_environment()
    monkeypatch.setattr(importlib.metadata, 'version', lambda name: '0.19.10')
    check_environment()


@pytest.mark.skipif(torch.cuda.is_available(), reason='with a GPU nothing need be compiled for the CPU')
def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(EnvironmentProblem, match=r'c\+\+ .*apt-get install g\+\+'):
        check_environment()
    compiler = tmp_path / 'mine'
    compiler.write_text('#!/bin/sh')
    compiler.chmod(0o755)
    monkeypatch.setenv('CXX', 'mine')
    check_environment()  # ninja is found in the environment, although the PATH does not name it
    assert shutil.which('ninja') is not None
