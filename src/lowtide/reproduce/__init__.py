"""The papers' experiments on the papers' networks: published figures beside ours."""
