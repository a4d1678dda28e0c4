// comm_threads.h — the threads that move bytes must not wait for the threads that compute.
//
// With as many ranks as cores every core computes, and a Linux scheduler lets a woken thread wait for the next tick: a message
// of 1 KB then takes 3 to 5 ms instead of 0.1 ms, and the peer stands still with it. Transfer threads run in short bursts
// and sleep otherwise, so they may go first: real-time priority where the system allows it (root, CAP_SYS_NICE, or a limit
// on `rtprio`), else as they are. INTERLACE_REALTIME=0 leaves all threads alone.
#pragma once

namespace interlace {

// Raises the threads of this process that run gloo's transfers.
void RaiseGlooThreads();
// Raises the calling thread.
void RaiseThisThread();

}  // namespace interlace
