"""Measured op costs on disk, so that a model is measured once per machine.

One JSON file per environment (device, threads, versions) in `LOWTIDE_CACHE_DIR`, or else in the user's cache folder.
Files are replaced whole, so a reader never sees half of one. A broken or unwritable cache is reported once and then
ignored: it only saves time.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.costs.op_signature import OpCost
from lowtide.environment import cache_dir
from lowtide.errors import LowtideWarning
from lowtide.files import replace_text

# To be raised when figures measured by an earlier lowtide no longer mean the same.
_VERSION = 2


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """How large the cache may grow.

    Attributes:
        ops: In one file; 20,000 distinct ops are those of about a hundred models.
        files: One for each environment; a user has a few devices, thread counts and versions in use.
    """

    ops: int = 20_000
    files: int = 32


LIMITS = CacheLimits()
_warned: set[Path] = set()


def clear() -> int:
    """Return the number of cache files deleted, which are all there are."""
    there = files()
    for file in there:
        file.unlink(missing_ok=True)
    return len(there)


def files() -> list[Path]:
    """Return the cache files."""
    return _files(cache_dir())


class CostCache:
    """The cached costs of one environment, read once when made."""

    def __init__(self, environment: str) -> None:
        self.environment = environment
        name = hashlib.sha256(f"{_VERSION} {environment}".encode()).hexdigest()[:16]
        self.path = cache_dir() / f"costs-{name}.json"
        self._ops = self._read()

    def get(self, signature: str) -> OpCost | None:
        """Return the cost of the op with this signature, or None if it is not known."""
        entry = self._ops.get(_key(signature))
        return None if entry is None else OpCost(float(entry["seconds"]), entry["workspace_bytes"])

    def add(self, costs: Mapping[str, OpCost]) -> None:
        """Add costs by signature, here and on disk, to what is there by now; the oldest go if there are too many."""
        if not costs:
            return
        fresh = {
            _key(signature): {"op": signature[:200], "seconds": cost.seconds, "workspace_bytes": cost.workspace_bytes}
            for signature, cost in costs.items()
        }
        # Another process may have written since this one read; its figures are kept.
        merged = {**self._ops, **self._read(), **fresh}
        self._ops = dict(list(merged.items())[-LIMITS.ops :])
        self._write()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["environment"] != self.environment:
                return {}
            return {key: entry for key, entry in content["ops"].items() if _is_valid(entry)}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _warn_once(self.path, f"cannot be read and is ignored ({error})")
            return {}

    def _write(self) -> None:
        content = {"environment": self.environment, "ops": self._ops}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.path, json.dumps(content, indent=0))
            _prune(self.path.parent)
        except OSError as error:
            _warn_once(self.path, f"cannot be written, so ops will be measured again ({error})")


def _key(signature: str) -> str:
    return hashlib.sha256(signature.encode()).hexdigest()[:32]


def _is_valid(entry: Any) -> bool:
    seconds, workspace = entry["seconds"], entry["workspace_bytes"]
    return isinstance(workspace, int) and workspace >= 0 and math.isfinite(seconds) and seconds >= 0


def _files(folder: Path) -> list[Path]:
    return list(folder.glob("costs-*.json")) if folder.is_dir() else []


def _prune(folder: Path) -> None:
    newest_first = sorted(_files(folder), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in newest_first[LIMITS.files :]:
        file.unlink(missing_ok=True)


def _warn_once(path: Path, problem: str) -> None:
    if path not in _warned:
        _warned.add(path)
        warnings.warn(f"The cost cache {path} {problem}.", LowtideWarning, stacklevel=2)
