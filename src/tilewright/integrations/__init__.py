"""Use Tilewright from other libraries; each module needs the library that it is named for."""
