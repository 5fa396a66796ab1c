"""The command line, one module a command, which docs/cli.md describes."""
