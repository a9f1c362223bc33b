"""Rehearsal engine: a program with vLLM 0.26's face and no GPU behind it.

It takes vLLM's flags, prints vLLM's log lines on the streams that vLLM uses, serves vLLM's endpoints and metrics, keeps
a compile cache on disk and a memory ledger, and dies when the ledger says so.  Every constant stands in
``personality.toml``; what happens follows from the flags and that file, never from the name of a variant.  The package
imports nothing else of this project.
"""
