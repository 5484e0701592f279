"""Operations on CUDA: a reference in torch and a Triton kernel behind one name."""
