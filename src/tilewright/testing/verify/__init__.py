"""Verify: every detector and every oracle case against an engine or anybody's callable.

``tilewright verify`` is its command line; docs/testing/verify.md tells how it is used.
"""
