"""Lower sets of a forward DAG, canonical strategies, and the dynamic program over them (Kusumoto et al. 2019)."""
