"""The last words of a grapheme-to-phoneme run: error rates on the test words, and a few of them with predictions."""

from __future__ import annotations

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from rich.console import Console
from rich.table import Table

from recipes.g2p_metrics import closest_pronunciation

__all__ = ['G2PReport']


class G2PReport(Callback):
    """Prints PER and WER of one split with example words each time that the split was evaluated.

    The examples are words of the evaluation itself, so nothing is generated twice and no rank does more than another.

    Args:
        label (str): Label of the evaluator to report on.
        split_size (int): Words in the split, of which the evaluator may see a part.
        num_examples (int): How many words to show.
    """

    def __init__(self, label: str, split_size: int, num_examples: int = 10):
        self.label = label
        self.split_size = split_size
        self.num_examples = num_examples
        self.examples: list[tuple[str, str, list[str]]] = []

    def eval_start(self, state: State, logger: Logger) -> None:
        """Forgets the examples of an earlier evaluation; on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Unused.
        """
        self.examples = []

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """Keeps the first words of this rank with their predictions.

        Args:
            state (State): Holds the batch and what ``eval_forward`` returned for it.
            logger (Logger): Unused.
        """
        if state.dataloader_label == self.label and len(self.examples) < self.num_examples:
            rows = zip(state.batch['spellings'], state.outputs, state.batch['references'], strict=True)
            self.examples = [*self.examples, *rows][: self.num_examples]

    def eval_end(self, state: State, logger: Logger) -> None:
        """Prints the report on rank 0.

        Collective: every rank asks the metrics for their values, which Composer has computed just before.

        Args:
            state (State): Holds the metrics of the split.
            logger (Logger): Unused.
        """
        if state.dataloader_label != self.label:
            return
        rates = {name: float(metric.compute()) for name, metric in state.eval_metrics[self.label].items()}
        if dist.get_global_rank() != 0:
            return
        words = state.eval_timestamp.sample.value
        console = Console()
        console.print(self._table())
        # On one line of its own, whatever the width of the terminal, so that it can be searched for.
        console.print(
            f'On {words:,} of the {self.split_size:,} {self.label} words, none of them seen in training: '
            f'PER {rates["PhonemeErrorRate"]:.4f}, WER {rates["WordErrorRate"]:.4f} '
            f'(any listed pronunciation counts as right)',
            soft_wrap=True,
        )

    def _table(self) -> Table:
        table = Table(title=f'{self.label} words')
        for column in ('word', 'predicted', 'listed', ''):
            table.add_column(column)
        for spelling, prediction, references in self.examples:
            verdict = 'right' if prediction in references else 'wrong'
            table.add_row(spelling, prediction, closest_pronunciation(prediction, references), verdict)
        return table
