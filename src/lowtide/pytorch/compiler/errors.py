"""The errors with which PyTorch's compiler says what it cannot do."""

from __future__ import annotations

from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, Unsupported, UserError

__all__ = ["BackendCompilerFailed", "TorchDynamoException", "Unsupported", "UserError", "is_untraceable"]


def is_untraceable(error: BaseException) -> bool:
    """Return True if `error` says that the user's code cannot be traced."""
    return isinstance(error, Unsupported | UserError)
