"""Plans through Inductor's generated code: its joint graph, planned; its code, run on fakes before it is accepted."""
