"""What each op of a program costs: measured on this device, or worked out for another one.

`resolve` takes what the user asks for. `measured` runs ops, by the `clock` that blocks are timed by too, and keeps what
it finds in `cache`; `analytic` works costs out from `device_table`. `op` says which calls cost the same.
"""

from lowtide.pytorch.required import check_pytorch

check_pytorch()
