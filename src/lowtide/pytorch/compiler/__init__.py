"""PyTorch's compiler: Dynamo, which traces Python, and AOTAutograd, which adds backward. Importing it takes seconds."""

from lowtide.pytorch.required import check_compiler

check_compiler()
