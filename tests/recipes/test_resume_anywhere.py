"""The script recipes/resume_anywhere.py: what it says is so."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from tests.recipes.recipes_on_ranks import resume


def test_the_story_is_true(two_ranks, tmp_path):
    differences = two_ranks.run(resume, str(tmp_path))
    assert max(differences) < 1e-6
    halfway = torch.load(tmp_path / 'ep0-ba20-rank0.pt', weights_only=False)['state']['model']
    exported = load_file(tmp_path / 'weights' / 'model.safetensors')
    assert halfway.keys() == exported.keys()
    for name, tensor in exported.items():
        # The second half trained as well, and so did the first: AdamW moves by lr = 0.01 in each optimizer step.
        assert 0.01 < (tensor - halfway[name]).abs().max() < 20 * 0.011, name
