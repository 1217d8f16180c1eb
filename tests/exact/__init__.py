"""Exact identities: every rule, every provenance it declares, all outcomes enumerated."""
