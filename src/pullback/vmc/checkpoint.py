"""The format of the files that minimizations are saved to."""

from __future__ import annotations

from .._core.checkpoint_file import CheckpointFormat

FORMAT = CheckpointFormat("a saved minimization", key="vmc_version", version=1)
