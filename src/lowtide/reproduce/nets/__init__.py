"""The papers' networks, written here so that reproducing the papers needs nothing but torch.

Every network returns its class scores; those trained with auxiliary classifiers return a tuple, main scores first.
"""
