"""The command line: ``tilewright run / plans / explain / doctor / bench``. See docs/cli.md."""
