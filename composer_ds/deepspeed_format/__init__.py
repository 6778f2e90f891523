"""DeepSpeed's own checkpoints, of a raw loop or of another trainer: read offline, without ranks.

``reading.py`` is the place to start; ``layout.py`` has the arithmetic of partitions.
"""

from composer_ds.deepspeed_format.folders import is_deepspeed_checkpoint
from composer_ds.deepspeed_format.reading import DeepSpeedSource

__all__ = ['DeepSpeedSource', 'is_deepspeed_checkpoint']
