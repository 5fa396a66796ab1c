"""Cases and the tests that hold them; test/cases.py puts them together."""
