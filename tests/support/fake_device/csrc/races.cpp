// What a kernel may touch: whatever conflicts with it must come before it.
//
// Each stream has a vector clock; waits of streams and of the host merge clocks. Two kernels are ordered if the later
// one's clock has the number of the earlier one. This is decided at the launch, whatever the threads do.
#include "fake.h"

namespace fake {
namespace {

std::string stream_name(size_t number) {
  c10::Stream stream = runtime().queues[number]->stream;
  return "stream " + std::to_string(stream.id()) + " of fake:" + std::to_string(stream.device_index());
}

const char* verb(bool writes) {
  return writes ? "writes" : "reads";
}

bool is_before(const Use& use, const Queue& queue) {
  return use.stream == queue.number || use.time <= queue.clock.of(use.stream);
}

}  // namespace

std::string race(Queue& queue, const std::vector<Access>& accesses, const Place& place) {
  for (const Access& access : accesses) {
    for (const Use& use : access.block->uses) {
      bool conflicts = (use.writes || access.writes) && use.begin < access.end && access.begin < use.end;
      if (!conflicts || is_before(use, queue)) continue;
      return "a race of two streams. " + stream_name(queue.number) + " " + verb(access.writes) + " memory in " +
          text(place) + "; " + stream_name(use.stream) + " " + verb(use.writes) + " it in " + text(use.place) +
          ", and neither waits for the other. Let the first stream wait for the second one before this call.";
    }
  }
  uint64_t time = queue.time + 1;
  for (const Access& access : accesses) {
    auto& uses = access.block->uses;
    // A use that is before this one, and within it, can be in no race that this one is not in.
    size_t kept = 0;
    for (size_t i = 0; i < uses.size(); i++) {
      bool is_within = access.begin <= uses[i].begin && uses[i].end <= access.end;
      bool covers = access.writes || (!uses[i].writes && uses[i].stream == queue.number);
      if (is_within && covers && is_before(uses[i], queue)) continue;
      if (kept != i) uses[kept] = uses[i];
      kept++;
    }
    uses.resize(kept);
    uses.push_back({queue.number, time, access.begin, access.end, access.writes, place});
  }
  return "";
}

std::string freed_too_early(const Block& block, const Place& place) {
  const Queue& owner = *block.owner;
  for (const Use& use : block.uses) {
    if (is_before(use, owner) || use.time <= runtime().host.of(use.stream)) continue;
    bool is_recorded = false;
    for (Queue* queue : block.recorded) is_recorded |= queue->number == use.stream;
    if (is_recorded) continue;
    return std::to_string(block.wanted) + " bytes of " + stream_name(owner.number) + " are given to the next tensor while " +
        stream_name(use.stream) + " may still use them: it " + verb(use.writes) + " them in " + text(use.place) +
        ". They were freed in " + text(place) + ". Call tensor.record_stream, or free the tensor after its own stream has waited.";
  }
  return "";
}

}  // namespace fake
