"""Running a step block by block, in eager mode: `lowtide.chain`, `chain_layers` and `unroll`.

A training call of a chain goes through these files, in this order:

1. `layers` and `unroll` turn a model's own layers, or a cell over a sequence, into a list of blocks. `chain` takes the
   call, refuses what cannot be chained (`refusals`), and looks for a program made for such a call before.
2. If there is none, `profile/chain_profile` goes through the blocks. Blocks that run as one are a unit; a unit at its
   place is a position (`block/position`, made of `block/contents`). `profile/unit_probe` runs each distinct unit by
   itself in `profile/isolated_run`, which restores all it changes, and `profile/unit_costs` measures it.
3. `profile/chain_graph` writes the graph and costs that planners see. `chain` asks the planner for a schedule.
4. `execute/chain_program` turns the schedule into `execute/steps` and runs them inside one node of the autograd graph;
   `execute/call_state` holds what one call keeps between forward and backward.
5. Each step runs a position: `block/block_graph` is the autograd graph of that run alone, `block/deferred_saves`
   lets a repeated run stop early, and `block/side_effects` and `python_state` make it see what the first run saw.

`policy` has the tuned numbers, except how often a block is timed, which `costs/clock` has. `block/tensor_spec` has the
types and small functions that all share.
"""

from lowtide.pytorch.required import check_pytorch

check_pytorch()
