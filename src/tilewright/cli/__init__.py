"""The command line: run, plans, explain, doctor, bench, verify, red. See docs/cli.md."""
