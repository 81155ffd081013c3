"""What tests share: models, strategies, oracles, and where things lie."""
