// Work space that calls share, so that a step allocates nothing per layer.
#pragma once

#include <ATen/ATen.h>

#include <array>

namespace tr {

// Work space of one thread's calls: grows to the largest call.
class Scratch {
  public:
    enum Use { kRows, kScales, kGated, kFirstJobRows, kSecondJobRows, kFirstJobScales, kSecondJobScales, kPanels, kDraw, kCut, kRouter, kNumUses };

    uint8_t* get(int use, int64_t bytes) {
        at::Tensor& held = held_[size_t(use)];
        if (!held.defined() || held.numel() < bytes) held = at::empty({bytes}, at::kByte);
        return held.data_ptr<uint8_t>();
    }

  private:
    std::array<at::Tensor, kNumUses> held_;
};

inline Scratch& scratch() {
    thread_local Scratch of_thread;
    return of_thread;
}

}  // namespace tr
