"""Turns requests into token ids and checked bodies, in processes with limits of processor time and memory."""
