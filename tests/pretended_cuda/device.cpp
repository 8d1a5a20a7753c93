// A CUDA device that only pretends: streams, events and guards that do nothing, so that a torch built without CUDA
// carries tensors of device "cuda" through autograd. Nothing is computed: tensors are fake (`device.py`).
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

static Device only_device() { return Device(DeviceType::CUDA, 0); }
static Stream only_stream() { return Stream(Stream::DEFAULT, only_device()); }

struct PretendedGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return only_device(); }
  Device getDevice() const override { return only_device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return only_stream(); }
  Stream getDefaultStream(Device) const override { return only_stream(); }
  Stream getStreamFromGlobalPool(Device, bool = false) const override { return only_stream(); }
  Stream getNewStream(Device, int = 0) const override { return only_stream(); }
  Stream exchangeStream(Stream) const override { return only_stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

struct PretendedHooks : at::CUDAHooksInterface {
  PretendedHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
};

namespace at {
using CUDAHooks = ::PretendedHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);  // found by torch when it first asks, so this library is loaded before torch
}  // namespace at

extern "C" void install() { c10::impl::registerDeviceGuard(DeviceType::CUDA, new PretendedGuard()); }
