"""What a run shows of itself: times of its ops for the next plan, and one step of all ranks as a trace."""
