"""What clients sent becomes token ids and checked bodies, in processes with limits of processor time and memory."""
