"""Decoders whose ``past_key_values`` become a cache of pages."""
