"""Operations by themselves: `verax bench ops`."""
