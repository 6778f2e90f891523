"""Prompts with responses for fine-tuning: from a file of JSON lines, or words with their pronunciations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from composer_ds.errors import ConfigError

__all__ = ['IGNORED_LABEL', 'Prompt', 'PromptCollator', 'count_tokens', 'read_prompts']

IGNORED_LABEL = -100  # the loss of Hugging Face models skips it


class Prompt(NamedTuple):
    """One sample.

    Args:
        prompt (str): What the model is given.
        response (str): What it is to answer.
    """

    prompt: str
    response: str


def read_prompts(path: str | None) -> list[Prompt]:
    """Reads prompts. No rank talks to another.

    Args:
        path (str | None): A file of JSON lines such as ``{"prompt": "2 + 2 = ", "response": "4"}``; ``None`` takes the
            words of the CMU Pronouncing Dictionary with their first listed pronunciations.

    Returns:
        list[Prompt]: In the order of the file.

    Raises:
        ConfigError: There is no such file, or a line of it has not the form above.
    """
    if path is None:
        from recipes.cmudict_data import read_words

        return [Prompt(f'{word.spelling} = ', word.pronunciations[0]) for word in read_words()]
    try:
        lines = Path(path).read_text(encoding='utf-8').splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'data.path is {path!r}, which is no text file in UTF-8 ({error})') from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
            prompts.append(Prompt(str(fields['prompt']), str(fields['response'])))
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f'data.path is {path!r}, of which line {number} is not a JSON object with the texts "prompt" and '
                f'"response"; write lines such as {{"prompt": "2 + 2 = ", "response": "4"}}'
            ) from None
    return prompts


class PromptCollator:
    """Makes batches, padded on the left, as generation needs it, to the longest of their samples.

    Args:
        tokenizer (Any): Encodes prompts and responses, apart from each other, so that a prompt has the same tokens in
            training and in generation.
        with_responses (bool): Whether the responses follow their prompts, for training; else for generation.
    """

    def __init__(self, tokenizer: Any, *, with_responses: bool):
        self.tokenizer = tokenizer
        self.with_responses = with_responses
        self.pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def __call__(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Encodes samples.

        Args:
            prompts (Sequence[Prompt]): The samples.

        Returns:
            dict[str, Any]: ``input_ids``, ``attention_mask`` and, for training, ``labels`` of shape (samples, length),
                int64: only the response and its end are labels. For generation ``responses``, a list of texts.
        """
        rows = []
        for prompt, response in prompts:
            given = self.tokenizer(prompt, add_special_tokens=False)['input_ids']
            wanted = self.tokenizer(response, add_special_tokens=False)['input_ids'] if self.with_responses else []
            ends = [self.tokenizer.eos_token_id] if self.with_responses else []
            rows.append((given, [*wanted, *ends]))
        length = max(len(given) + len(wanted) for given, wanted in rows)
        batch: dict[str, Any] = {name: [] for name in ('input_ids', 'attention_mask', 'labels')}
        for given, wanted in rows:
            paddings = length - len(given) - len(wanted)
            batch['input_ids'].append([self.pad] * paddings + given + wanted)
            batch['attention_mask'].append([0] * paddings + [1] * (length - paddings))
            batch['labels'].append([IGNORED_LABEL] * (length - len(wanted)) + wanted)
        batch = {name: torch.tensor(values) for name, values in batch.items()}
        if not self.with_responses:
            del batch['labels']
            batch['responses'] = [response for _, response in prompts]
        return batch


def count_tokens(batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """Counts what Composer's ``accumulate_train_batch_on_tokens`` weights microbatches by, padding left out.

    Args:
        batch (dict[str, torch.Tensor]): A training batch or microbatch.

    Returns:
        dict[str, int]: ``total``: tokens of prompts and responses; ``loss_generating``: of responses.
    """
    labels = int((batch['labels'] != IGNORED_LABEL).sum())
    return {'total': int(batch['attention_mask'].sum()), 'loss_generating': labels}
