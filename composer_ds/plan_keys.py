"""Under which keys a run's hyperparameters have its plan and its environment."""

from __future__ import annotations

__all__ = ['ENVIRONMENT', 'PLAN']

PLAN = 'deepspeed_plan'
"""What is run. ``deepspeed`` is the section of the YAML there: what was asked for."""
ENVIRONMENT = 'deepspeed_environment'
"""Versions, ranks and devices."""
